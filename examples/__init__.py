"""Programs that use jattn the way a serving stack does."""
