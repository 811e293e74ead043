"""The frozen large model that a drafter drafts for: loaded, its states captured, its numbers copied."""
