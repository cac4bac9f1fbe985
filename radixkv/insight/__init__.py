"""What makes a prompt part from an earlier one: prompts compared as texts, chats and tools."""
