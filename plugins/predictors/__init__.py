"""How long an answer will be: what schedulers and admission may count on."""
