"""A whole cluster on one machine: `hisparse up`."""
