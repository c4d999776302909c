"""HTTP/1.1 over TCP and TLS: connections, exchanges, and fairness among clients. Knows no API."""
