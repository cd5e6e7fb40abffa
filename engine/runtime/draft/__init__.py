"""The draft model's side of an engine: its own small runner, and who asks it."""
