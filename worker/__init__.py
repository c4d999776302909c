"""The worker process. Internal to hisparse: programs import `hisparse` alone."""
