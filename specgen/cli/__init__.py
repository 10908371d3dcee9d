"""The commands: options, what is printed, exit codes. Imports everything; nothing imports it."""
