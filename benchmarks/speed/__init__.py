"""Where a private step spends time and memory, beside plain training and other libraries."""
