"""Building checklisted tasks from conversations."""
