"""Schedules of pipelines: actions, slots, transfers, and how long they take."""
