"""The console script `gradaccum`: one thin file a command; a command imports what it needs when it runs."""
