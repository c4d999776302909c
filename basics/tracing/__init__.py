"""Spans of traces, and the thread that sends them to a receiver."""
