"""What a deployment is: its configuration, its model's card, where its blocks are kept."""
