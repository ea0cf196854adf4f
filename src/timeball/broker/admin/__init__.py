"""Operations for operators: topics, groups, accounts, campaigns, push subscriptions, and reports of jobs."""
