"""The link to the coordinator: its decisions, its messages and the reports that survive a lost link."""
