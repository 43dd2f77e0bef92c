"""Reports on a sharding: bytes per device, collectives of a compiled step, audits of rule tables; text, data, HTML."""
