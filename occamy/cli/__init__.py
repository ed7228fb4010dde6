"""The command line: `occamy <command>`. An error is one message that names value and fix."""
