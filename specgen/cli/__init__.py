"""The commands: options, printing, exit codes. Imports everything; nothing imports it."""
