"""What coordinator, worker and clients share: the wire protocol, errors, settings, units and the transport."""
