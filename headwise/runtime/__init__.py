"""Configuration, requests, the engine, models and the client."""
