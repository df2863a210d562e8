"""Pipelines: schedules, their simulation and slots, and how a rank runs its part of one."""
