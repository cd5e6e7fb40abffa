"""The operations of a token's way through a layer, and the registry that picks each one."""
