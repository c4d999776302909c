"""Traces of requests, sent to a collector of OpenTelemetry."""
