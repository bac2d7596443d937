"""Optional packages ("neighbours") of the core: each can be removed, and is loaded only through `magis.registry`."""
