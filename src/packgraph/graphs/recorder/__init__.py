"""The CPU backend: records operations on static memory, replays them bit by bit, and emulates pools
and copies."""
