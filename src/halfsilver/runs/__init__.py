"""One run on disk: its folder, session, checkpoint, privacy statement, and the check of all of these from outside."""
