"""Arrays between groups: within a process, and between processes."""
