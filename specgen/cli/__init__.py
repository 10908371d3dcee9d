"""The commands: options, printing, exit codes. May import everything; nothing imports it."""
