"""What makes a prompt part from an earlier one: prompts compared as texts, chats, tools and tokens."""
