"""The coordinator process. Internal to hisparse: programs import `hisparse` alone."""
