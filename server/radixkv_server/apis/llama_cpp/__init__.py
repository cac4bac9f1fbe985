"""What llama.cpp's clients ask of a server beside OpenAI's routes."""
