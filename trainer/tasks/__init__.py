"""Where prompts and rewards come from. :mod:`.catalogue` turns a name into a task."""
