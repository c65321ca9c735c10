"""One file per architecture: its keys, defaults and variants. Each defines READERS: GGUF name -> spec reader."""
