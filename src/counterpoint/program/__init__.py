"""The one intermediate form: instructions, rows, text, the walk, the laws, the rewrites, the trace."""
