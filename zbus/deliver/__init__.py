"""The path of an event to its subscribers: the key trie, the dispatcher, subscriptions, replay and handlers."""
