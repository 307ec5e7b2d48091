"""What an exported folder brings along, so that Hugging Face's libraries can run the model from it.

These two files are copied there; they import nothing of this project.
"""
