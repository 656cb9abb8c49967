"""Programs: the intermediate representation between plans and execution, its text form, rewrites and verification."""
