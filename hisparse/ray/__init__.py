"""A cluster on several machines, placed and kept alive with Ray: `hisparse up --ray`, `hisparse down`."""
