"""What people see on a terminal: tables, progress, escaping of foreign text."""
