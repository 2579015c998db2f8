"""OpenAI's API over HTTP, on a client of the deployment. Keeps no state: any of several servers answers any request."""
