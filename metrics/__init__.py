"""Metrics, alerts and dashboards. Internal to hisparse: programs import `hisparse` alone."""
