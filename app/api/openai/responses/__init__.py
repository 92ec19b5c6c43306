"""`/v1/responses`, stored responses and those in the background."""
