"""The commands: options, what is printed, exit codes. May import everything; nothing imports it."""
