"""The command line: one file a command, each with SUMMARY, configure(parser) and run(args) -> exit code."""
