"""How a decode engine takes delivery of KV. One module per engine; each may import that engine's library."""
