"""What a trained model computed: numbers to look at, never to train on."""
