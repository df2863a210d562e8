"""Schedules and plans as text, pictures and Chrome traces."""
