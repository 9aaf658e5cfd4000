"""Text and tokens: prompts, chats, required forms of an output, and what a choice says."""
