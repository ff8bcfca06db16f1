"""What a run leaves behind for people and machines: report, matrix, trend, badge and certificate."""
