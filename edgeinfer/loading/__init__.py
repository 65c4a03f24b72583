"""From a file name and `LoadOptions` to an engine, within a limit of memory."""
