"""Where drafts come from: one file a drafter. What it says changes speed and never the text."""
