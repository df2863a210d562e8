"""Pictures of pipeline schedules, as text and as SVG."""
