"""From one request to one verified plan: the model under test, its searches, and the plans kept of them."""
