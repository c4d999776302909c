"""The coordinator's end of every connection: bound sockets, authentication, connection tracking, rate limits."""
